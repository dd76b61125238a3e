"""Vision-language side of mmspec: targets, image and video input, drafters and their training."""
