"""The page of a run: what it learned and where it errs, in one HTML file without external resources."""
