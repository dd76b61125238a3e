"""Libraries of the decoding measurements: acceptance, losslessness, step cost, chains against trees, ablations."""
