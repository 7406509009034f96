"""Rows and blocks on the move: tokens into their slots and out again, whole blocks, changed entries of a table."""
