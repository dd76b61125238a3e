"""Pictures of everyday things from packages, composed and described for training."""
