"""Steps on a device that computes while the host prepares the next step."""
