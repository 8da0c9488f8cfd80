"""What steps cost in seconds: the model, and its fit to measured steps."""
