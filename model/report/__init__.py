"""The page of a run: what it learned and where it errs, in one HTML file without external resources.

From outside: `page.Report`, with sections of `page.Section`; `curves.curves` for what a run has recorded.
"""
