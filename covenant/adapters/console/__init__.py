"""The web console: its files, the login of a browser, and the requests that its pages may send."""
