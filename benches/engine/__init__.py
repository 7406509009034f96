"""What benches/engine.py is made of."""
