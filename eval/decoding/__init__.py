"""Libraries of the decoding benchmarks: acceptance, speed, losslessness, step cost, trees against chains, ablations."""
