"""Commands for images, videos, and drafters of vision-language models."""
