"""Reports: one self-contained HTML file per run and per comparison; nothing is fetched, no script runs."""
