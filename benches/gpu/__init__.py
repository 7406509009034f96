"""The parts of benches/gpu.py: shapes and verdicts (pure), timing on a device, the calls that are timed, the checks."""
