"""Reads samples in tables: CSV and Parquet."""
