"""What the router knows of nodes, and its links to them."""
