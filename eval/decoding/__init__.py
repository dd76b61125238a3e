"""Libraries of the decoding studies: speed tables, step cost, trees against chains, coverage of model classes."""
