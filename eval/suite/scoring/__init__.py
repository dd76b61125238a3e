"""How answers are scored: functions that take samples with their answers and give figures, the main one first."""
