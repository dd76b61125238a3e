"""Training of the embedded vision-language model from scratch, on drawn scenes."""
