"""The router: front doors, choice of nodes, one state machine per request."""
