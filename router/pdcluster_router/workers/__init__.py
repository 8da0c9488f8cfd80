"""Several router processes as one."""
