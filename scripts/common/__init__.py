"""Devices, timelines, traces and requirements for all scripts."""
