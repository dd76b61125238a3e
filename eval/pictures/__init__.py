"""Captions of real photographs and of blank pictures: what they are, how they are fetched, how captions are judged."""
