"""What benches/ops.py is made of."""
