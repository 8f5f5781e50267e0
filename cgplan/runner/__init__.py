"""Serving: sessions, runners, staging, statistics."""
