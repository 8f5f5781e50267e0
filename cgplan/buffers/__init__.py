"""Tensors in, tensors out: static buffers, copies into them, results cut out of them."""
