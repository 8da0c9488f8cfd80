"""Media that carry KV, behind one seam (`base`)."""
