"""Static buffers, copies into them, results cut out of them."""
