"""Speculative decoding: a draft and a target in one pool."""
