"""The data plane: HTTP/1.1 in and out as asyncio protocols on llhttp. Routes nothing by itself."""
