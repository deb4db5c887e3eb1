"""What every folder uses: errors, files, paths, parquet, worker processes, units, consoles.

Nothing here is specific to programs or devices, or imports another folder of opcast.
"""
