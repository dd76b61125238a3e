"""MSD and FLASH drafters."""
