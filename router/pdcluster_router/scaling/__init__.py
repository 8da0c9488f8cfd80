"""Rules by which pools grow and shrink, as replay compares them."""
