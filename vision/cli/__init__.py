"""Commands of images, videos, and drafters of vision-language models."""
