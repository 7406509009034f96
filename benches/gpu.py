"""Everything about the kernels that needs a GPU, in one command: build, check, time, and say what is missed.

    python benches/gpu.py                      all of it; exit status 1 if a check fails (missed bars are shown only)
    python benches/gpu.py --only time          the table alone, of kernels that are built
    python benches/gpu.py --json build/gpu.json

Checked: the differential tests on the device, compute-sanitizer (memcheck and racecheck, where it is found) on a small
suite, and the decode script against transformers, eagerly and with captured graphs. Timed: decode of the listed shapes
(K = 8 kv heads of 128, 32 query heads, blocks of 16, shuffled tables; bf16, and fp8 with a scale for each row) as a
fraction of the bandwidth of a copy within the device, measured in the same rounds, beside the peers that are installed
(FlashInfer, flash-attn) and torch's SDPA over contiguous K and V. A graph launch goes round over enough layers that no
call finds its K and V in the GPU's cache. Bars are for an H200; figures are medians.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from gpu import steps
from gpu.figures import SHAPES, Figure, as_json, as_table

PEERS = ("flashinfer", "flash_attn")


def check(only: set[str]) -> list[steps.Outcome]:
    outcomes = []
    for step in steps.all_steps(sanitizer=steps.find_sanitizer()):
        if "check" not in only and not (step.name == "build" and "build" in only):
            continue
        outcomes.append(steps.run(step, dict(os.environ)))
        print(f"{outcomes[-1].name:32} {outcomes[-1].outcome} ({outcomes[-1].seconds:.0f} s)", flush=True)
    return outcomes


def time_all(rounds: int) -> list[Figure]:
    """The native library is loaded here, after the build."""
    from gpu import calls, device

    copies, figures = device.CopyBuffer(), []
    for shape in SHAPES:
        inputs = calls.Inputs(shape)
        sides = {"kvpager": calls.ours(inputs)}
        for name in PEERS:
            size = calls.block_size_of(name)
            if found := calls.peer(name, inputs if size == inputs.cache.block_size else calls.Inputs(shape, size)):
                sides[name] = found
        if found := calls.packed_sdpa(inputs):
            sides["SDPA"] = found
        captured = {name: device.Captured(given) for name, given in sides.items()}
        figures.append(Figure(shape, *device.medians(captured, copies, rounds)))
        print(as_table(figures[-1:])[1], flush=True)
        del inputs, sides, captured
        torch.cuda.empty_cache()
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="build,check,time", help="comma-separated: build, check, time (default all)")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path, help="write outcomes and figures here")
    options = parser.parse_args()
    only = set(options.only.split(","))
    if not torch.cuda.is_available():
        print("benches/gpu.py needs a GPU, and torch sees none; `make cuda-check` does what can be done without")
        return 2
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}, torch {torch.__version__}")
    outcomes = check(only)
    figures = time_all(options.rounds) if "time" in only else []
    if figures:
        print("\n" + "\n".join(as_table(figures)))
    if options.json:
        result = {
            "gpu": gpu, "torch": torch.__version__, "checks": [asdict(outcome) for outcome in outcomes],
            "figures": as_json(figures),
        }  # fmt: skip
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any(outcome.outcome == "failed" for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
