"""Attention over a paged cache: decode, prefill, a shared prefix, the merge of partial results, and who computes it."""
