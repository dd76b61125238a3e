"""Vision-language models: targets, image and video input, MSD and FLASH drafters and their training."""
