"""As much of a Kubernetes client as discovery needs: lists and watches, and the credentials for them.

`access` is where the API server is and by what one is let in, `api` one request, `mirror` a copy of a collection that is kept
up to date, `objects` the few fields that are read. It is written here, on the HTTP client that is there anyway, because a
watch is all about its ends (an expired version, a silent connection, a throttled server, a token that was rotated), and those
are to be told and bounded like everything else that this gateway waits for.
"""
