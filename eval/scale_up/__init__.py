"""Function-preserving widening of small trained models, so that speed is measured in the shapes of big ones."""
