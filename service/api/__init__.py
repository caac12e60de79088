"""The HTTP API: routes, request and response schemas, and the application that `app.create_app` returns.

`native_routes` contains the routes of Quartet's own API. The API dialect of another server is one more file of that
kind.
"""
