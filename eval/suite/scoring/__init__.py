"""Scorers: functions from samples with answers to scores by name, the main score first."""
