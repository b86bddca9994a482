"""The page that shows runs: `ratchet ui` serves it live, and `ratchet report` writes it into one HTML file.

`documents` says what the page shows, `page` builds its HTML, `server` serves both, and `static/` is the front end.
"""
