"""Training of MSD and FLASH drafters."""
