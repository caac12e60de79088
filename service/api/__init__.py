"""The HTTP API: routes, request and response schemas, and the application that `app.create_app` makes.

`native_routes` has the routes of Quartet's own API; a dialect of another server is one more file like it.
"""
