"""Requests that two servers might read differently, malformed ones, and odd ones that have one meaning.

Each with its answer, what becomes of the connection, and what the worker gets of it. The tests beside send them to the
gateway directly and through other servers, and put other servers behind it.
"""

from __future__ import annotations

from typing import NamedTuple

LINE = b"POST /v1/chat/completions HTTP/1.1\r\n"
HOST = b"Host: g\r\n"
BODY = b'{"model":"sim"}'
SIZED = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
JSON_CHUNKS = b'{"model":"sim","x":"5\\r\\n0\\r\\n\\r\\n"}'
INNER = b"POST /v1/completions HTTP/1.1\r\nHost: g\r\n\r\n"


class Case(NamedTuple):
    """What is sent, and what a client of the gateway gets for it."""

    name: str
    data: bytes
    statuses: tuple[int, ...] = (400,)
    closes: bool = True
    """Whether the connection ends with the answer, so that nothing behind it is read."""
    reaches: tuple[bytes, ...] = ()
    """Bodies of the requests that the worker gets, in order."""


def post(*fields: bytes, body: bytes = BODY, host: bytes = HOST) -> bytes:
    return LINE + host + b"".join(fields) + b"\r\n" + body


def length(value: bytes) -> bytes:
    return post(b"Content-Length:" + value + b"\r\n")


def coding(value: bytes) -> bytes:
    return post(b"Transfer-Encoding:" + value + b"\r\n", body=CHUNKS)


def chunks(body: bytes) -> bytes:
    return post(CHUNKED, body=body)


def served(name: str, data: bytes, *bodies: bytes) -> Case:
    """It has one meaning, and is answered."""
    return Case(name, data, (200,), False, bodies or (BODY,))


def own(name: str, data: bytes, *statuses: int) -> Case:
    """It is understood and goes no further; the next request on the connection is served."""
    return Case(name, data, statuses or (404,), False)


def at(target: bytes, *fields: bytes, body: bytes = BODY) -> bytes:
    return LINE.replace(b"/v1/chat/completions", target) + HOST + SIZED + b"".join(fields) + b"\r\n" + body


REFUSED = [
    # Two ways to tell the body's length.
    Case("length and coding", post(SIZED, CHUNKED, body=CHUNKS)),
    Case("coding and length", post(CHUNKED, SIZED, body=CHUNKS)),
    Case("coding and length of zero", post(CHUNKED, b"Content-Length: 0\r\n", body=CHUNKS)),
    Case("length twice, equal", post(SIZED, SIZED)),
    Case("length twice, different", post(SIZED, b"Content-Length: 4\r\n")),
    Case("length twice, other case", post(SIZED, b"content-length: 4\r\n")),
    Case("coding twice", post(CHUNKED, CHUNKED, body=CHUNKS)),
    Case("coding twice, identity first", post(b"Transfer-Encoding: identity\r\n", CHUNKED, body=CHUNKS)),
    # Lengths.
    Case("length +", length(b" +15")),
    Case("length -", length(b" -1")),
    Case("length hex", length(b" 0x5")),
    Case("length list", length(b" 15, 15")),
    Case("length list without space", length(b" 15,15")),
    Case("length with a space inside", length(b" 1 5")),
    Case("length empty", length(b"")),
    Case("length blank", length(b"   ")),
    Case("length of 20 digits", length(b" 18446744073709551616")),
    Case("length of 20 digits that wraps to 15", length(b" 18446744073709551631")),
    Case("length of 100 zeros and 15", length(b" " + b"0" * 100 + b"15")),
    Case("length in Arabic digits", length(" \u0661\u0665".encode())),
    Case("length in full-width digits", length(" \uff11\uff15".encode())),
    Case("length as a float", length(b" 15.0")),
    Case("length in exponents", length(b" 1e1")),
    Case("length with an underscore", length(b" 1_5")),
    Case("length with a semicolon", length(b" 15;a")),
    Case("length with a vertical tab", length(b" \x0b15")),
    Case("length with a form feed", length(b" 15\x0c")),
    Case("length in quotes", length(b' "15"')),
    Case("length with a no-break space", length(b" \xa015")),
    # Codings.
    Case("gzip", coding(b" gzip")),
    Case("gzip, chunked", coding(b" gzip, chunked")),
    Case("chunked, gzip", coding(b" chunked, gzip")),
    Case("chunked twice in a list", coding(b" chunked, chunked")),
    Case("xchunked", coding(b" xchunked")),
    Case("chunkedx", coding(b" chunkedx")),
    Case("chunked with weight", coding(b" chunked;q=1")),
    Case("identity", coding(b" identity")),
    Case("identity, chunked", coding(b" identity, chunked")),
    Case("coding empty", coding(b"")),
    Case("coding of a comma", coding(b" ,chunked")),
    Case("coding with trailing comma", coding(b" chunked,")),
    Case("coding in quotes", coding(b' "chunked"')),
    Case("coding behind a vertical tab", coding(b" \x0bchunked")),
    Case("coding behind NUL", coding(b" \x00chunked")),
    Case("coding with a space inside", coding(b" chun ked")),
    Case("coding in HTTP/1.0", b"POST /v1/chat/completions HTTP/1.0\r\n" + HOST + CHUNKED + b"\r\n" + CHUNKS),
    # Field lines.
    Case("space before the colon of a coding", post(b"Transfer-Encoding : chunked\r\n", body=CHUNKS)),
    Case("space before the colon of a length", post(b"Content-Length : 15\r\n")),
    Case("tab before the colon", post(SIZED, b"X-A\t: b\r\n")),
    Case("space before the first field", LINE + b" Host: g\r\n" + SIZED + b"\r\n" + BODY),
    Case("folded with a space", post(SIZED, b"X-A: b\r\n c\r\n")),
    Case("folded with a tab", post(SIZED, b"X-A: b\r\n\tc\r\n")),
    Case("folded coding", post(b"Transfer-Encoding:\r\n chunked\r\n", body=CHUNKS)),
    Case("folded blank line", post(SIZED, b"X-A: b\r\n \r\n")),
    Case("bare LF ends a field", post(SIZED, b"X-A: b\n")),
    Case("bare LF ends the request line", LINE[:-2] + b"\n" + HOST + SIZED + b"\r\n" + BODY),
    Case("bare LF everywhere", post(SIZED).replace(b"\r\n", b"\n")),
    Case("bare LF ends the head", LINE + HOST + SIZED[:-2] + b"\n\n" + BODY),
    Case("bare CR hides a coding", post(SIZED, b"X-A: b\rTransfer-Encoding: chunked\r\n")),
    Case("bare CR in a value", post(SIZED, b"X-A: b\rc\r\n")),
    Case("bare CR before CRLF", post(SIZED, b"X-A: b\r\r\n")),
    Case("bare CR in the request line", LINE[:-2] + b"\r" + LINE[-2:] + HOST + SIZED + b"\r\n" + BODY),
    Case("NUL in a value", post(SIZED, b"X-A: b\x00c\r\n")),
    Case("NUL in a name", post(SIZED, b"X\x00A: b\r\n")),
    Case("NUL in the target", LINE.replace(b"chat", b"ch\x00at") + HOST + SIZED + b"\r\n" + BODY),
    Case("control character in a value", post(SIZED, b"X-A: b\x01c\r\n")),
    Case("DEL in a value", post(SIZED, b"X-A: b\x7fc\r\n")),
    Case("field without a colon", post(SIZED, b"X-A\r\n")),
    Case("field without a name", post(SIZED, b": b\r\n")),
    Case("name with a space", post(SIZED, b"X A: b\r\n")),
    Case("name in brackets", post(SIZED, b"[X]: b\r\n")),
    Case("name with a slash", post(SIZED, b"X/A: b\r\n")),
    Case("name with a quote", post(SIZED, b'X"A: b\r\n')),
    Case("name with a comma", post(SIZED, b"X,A: b\r\n")),
    Case("name with a high byte", post(SIZED, b"X\xe9: b\r\n")),
    Case("name with a vertical tab", post(SIZED, b"\x0bContent-Length: 4\r\n")),
    # Host.
    Case("no host", post(SIZED, host=b"")),
    Case("host twice, equal", post(HOST, SIZED)),
    Case("host twice, different", post(b"Host: other\r\n", SIZED)),
    Case("host twice, other case", post(b"HOST: g\r\n", SIZED)),
    # Request lines.
    Case("method in lower case", b"post" + post(SIZED)[4:]),
    Case("method that nobody has", b"FROB" + post(SIZED)[4:]),
    Case("method with a brace", b"PO{T" + post(SIZED)[4:]),
    Case("method with a control character", b"PO\x01T" + post(SIZED)[4:]),
    Case("method alone", b"POST\r\n" + HOST + b"\r\n"),
    Case("space before the method", b" " + post(SIZED)),
    Case("target with a space", LINE.replace(b"/chat", b"/ch at") + HOST + SIZED + b"\r\n" + BODY, (400, 505)),
    Case("two spaces before the version", LINE.replace(b" HTTP", b"  HTTP") + HOST + SIZED + b"\r\n" + BODY),
    Case("tab for a space", LINE.replace(b" HTTP", b"\tHTTP") + HOST + SIZED + b"\r\n" + BODY),
    Case("space after the version", LINE[:-2] + b" \r\n" + HOST + SIZED + b"\r\n" + BODY, (400, 505)),
    Case("target without a slash", LINE.replace(b"/v1/chat", b"v1/chat") + HOST + SIZED + b"\r\n" + BODY),
    Case("target of another scheme", LINE.replace(b"/v1/", b"ftp://g/v1/") + HOST + SIZED + b"\r\n" + BODY),
    Case("target in authority form", LINE.replace(b"/v1/chat/completions", b"g:80") + HOST + SIZED + b"\r\n" + BODY),
    Case("no version", b"POST /v1/chat/completions\r\n" + HOST + SIZED + b"\r\n" + BODY, (400, 505)),
    Case("HTTP/0.9", LINE.replace(b"1.1", b"0.9") + HOST + SIZED + b"\r\n" + BODY, (400, 505)),
    Case("HTTP/2.0", LINE.replace(b"1.1", b"2.0") + HOST + SIZED + b"\r\n" + BODY, (400, 505)),
    Case("HTTP/1.2", LINE.replace(b"1.1", b"1.2") + HOST + SIZED + b"\r\n" + BODY, (400, 505)),
    Case("HTTP/1.10", LINE.replace(b"1.1", b"1.10") + HOST + SIZED + b"\r\n" + BODY, (400, 505)),
    Case("HTTP/11", LINE.replace(b"1.1", b"11") + HOST + SIZED + b"\r\n" + BODY, (400, 505)),
    Case("http in lower case", LINE.replace(b"HTTP", b"http") + HOST + SIZED + b"\r\n" + BODY, (400, 505)),
    Case("ICY", LINE.replace(b"HTTP/1.1", b"ICE/1.0") + HOST + SIZED + b"\r\n" + BODY, (400, 505)),
    Case("HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400, 505)),
    Case("TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"),
    # Tunnels.
    Case("upgrade to websocket", post(b"Upgrade: websocket\r\n", b"Connection: Upgrade\r\n", SIZED), (501,)),
    Case("upgrade to h2c", post(b"Upgrade: h2c\r\n", b"Connection: Upgrade, HTTP2-Settings\r\n", SIZED), (501,)),
    Case("upgrade without connection", post(b"Upgrade: websocket\r\n", SIZED), (501,)),
    Case("CONNECT", b"CONNECT g:443 HTTP/1.1\r\n" + HOST + b"\r\n", (501,)),
    Case("CONNECT to a path", b"CONNECT /v1/models HTTP/1.1\r\n" + HOST + b"\r\n", (400, 501)),
    # Chunks.
    Case("chunk size not hex", chunks(b"zz\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk size negative", chunks(b"-f\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk size with plus", chunks(b"+f\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk size with 0x", chunks(b"0xf\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk size behind a space", chunks(b" f\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk size with an underscore", chunks(b"0_f\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk size empty", chunks(b"\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk size of 16 digits", chunks(b"000000000000000f\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk size overflows", chunks(b"1000000000000000f\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk size beyond the limit", chunks(b"fffffffffffffff\r\n" + BODY + b"\r\n0\r\n\r\n"), (413,)),
    Case("chunk header ends in LF", chunks(b"f\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk header ends in CR", chunks(b"f\r" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk extension hides LF", chunks(b"f;\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk extension hides CR", chunks(b"f;a\rb\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk extension hides NUL", chunks(b"f;a\x00b\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk extension too long", chunks(b"f;" + b"a" * 5000 + b"\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk data without CRLF", chunks(b"f\r\n" + BODY + b"0\r\n\r\n")),
    Case("chunk data ends in LF", chunks(b"f\r\n" + BODY + b"\n0\r\n\r\n")),
    Case("chunk data ends in CR", chunks(b"f\r\n" + BODY + b"\rX0\r\n\r\n")),
    Case("chunk data longer than it says", chunks(b"e\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("trailer without a colon", chunks(b"f\r\n" + BODY + b"\r\n0\r\nX\r\n\r\n")),
    Case("trailer ends in LF", chunks(b"f\r\n" + BODY + b"\r\n0\r\nX: y\n\r\n")),
    Case("trailer folded", chunks(b"f\r\n" + BODY + b"\r\n0\r\nX: y\r\n z\r\n\r\n")),
    Case("last chunk ends in LF", chunks(b"f\r\n" + BODY + b"\r\n0\n\n")),
    # Limits.
    Case("too many fields", post(SIZED, b"X-A: b\r\n" * 101), (431,)),
    Case("head too large", post(SIZED, b"X-A: " + b"b" * 70_000 + b"\r\n"), (431,)),
    Case("body too large", post(b"Content-Length: 99999999999\r\n"), (413,)),
    Case("expectation", post(SIZED, b"Expect: 200-ok\r\n"), (417,)),
    Case("expectation twice", post(SIZED, b"Expect: 100-continue\r\n", b"Expect: 200-ok\r\n"), (417,)),
    # One more field that a neighbour may take for the other.
    Case("coding twice, the second unknown", post(CHUNKED, b"Transfer-encoding: cow\r\n", body=CHUNKS)),
    Case("coding behind a bare LF", post(SIZED, b"X: X\nTransfer-Encoding: chunked\r\n")),
    Case("length behind a bare CR", post(b"X: X\rContent-Length: 4\r\n", SIZED)),
    Case("NUL behind the name of a length", post(SIZED, b"Content-Length\x00: 4\r\n")),
    Case("vertical tab behind the name of a coding", post(SIZED, b"Transfer-Encoding\x0b: chunked\r\n")),
    Case("no-break space behind the name of a coding", post(SIZED, b"Transfer-Encoding\xa0: chunked\r\n")),
    Case("folded length", post(b"Content-Length:\r\n 15\r\n")),
    Case("folded behind the request line", LINE + b"\tX: y\r\n" + HOST + SIZED + b"\r\n" + BODY),
    Case("length and coding in HTTP/1.0", post(SIZED, CHUNKED, body=CHUNKS).replace(b"HTTP/1.1", b"HTTP/1.0")),
    Case("coding with a delete character", coding(b" chunked\x7f")),
    Case("coding with a high byte", coding(b" chunked\xff")),
    Case("three lengths", post(SIZED, b"Content-Length: 0\r\n", SIZED)),
    Case("length of a get twice", b"GET /v1/chat/completions HTTP/1.1\r\n" + HOST + SIZED + SIZED + b"\r\n" + BODY),
    Case("length and coding of a get", b"GET /nowhere HTTP/1.1\r\n" + HOST + SIZED + CHUNKED + b"\r\n" + CHUNKS),
    # Targets.
    Case("target empty", LINE.replace(b"/v1/chat/completions", b"") + HOST + SIZED + b"\r\n" + BODY),
    Case("target with high bytes", at("/v1/chat/\u4e2d".encode())),
    Case("target with a tab", at(b"/v1/chat\t/completions")),
    Case("target with a delete character", at(b"/v1/chat\x7f")),
    Case("target with a bare CR", at(b"/v1/chat\r/completions")),
    Case("target of a file", at(b"file:///etc/passwd")),
    Case("target of a name alone", at(b"localhost")),
    Case("target with a backslash first", at(b"\\v1\\models")),
    # More chunks.
    Case("chunk size in octal dress", chunks(b"0o17\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk size behind a tab", chunks(b"\tf\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk size in full-width digits", chunks("\uff11".encode() + b"\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk size with a dot", chunks(b"f.0\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk size list", chunks(b"f,f\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("two CRLF behind a chunk", chunks(b"f\r\n" + BODY + b"\r\n\r\n0\r\n\r\n")),
    Case("trailer with NUL", chunks(b"f\r\n" + BODY + b"\r\n0\r\nX: y\x00\r\n\r\n")),
    Case("trailer with a space before the colon", chunks(b"f\r\n" + BODY + b"\r\n0\r\nX : y\r\n\r\n")),
    Case("trailer with a bare CR", chunks(b"f\r\n" + BODY + b"\r\n0\r\nX: y\rZ: 1\r\n\r\n")),
    Case("trailer that is a request", chunks(b"f\r\n" + BODY + b"\r\n0\r\nGET /a HTTP/1.1\r\n\r\n")),
]

SERVED = [
    served("no space before the value", length(b"15")),
    served("blanks round the value", length(b"\t 15 \t")),
    served("leading zeros", length(b" 0015")),
    served("coding in capitals", coding(b" CHUNKED")),
    served("coding behind a tab", coding(b"\tchunked")),
    served("empty value", post(SIZED, b"X-A:\r\n")),
    served("high bytes in a value", post(SIZED, "X-A: \u4e2d\u6587 \xe9\r\n".encode())),
    served("odd but legal name", post(SIZED, b"!#$%&'*+-.^_`|~9: b\r\n")),
    served("empty connection options", post(SIZED, b"Connection: , ,\r\n")),
    served("empty host", post(SIZED, host=b"Host:\r\n")),
    served("upper case and many zeros", chunks(b"F\r\n" + BODY + b"\r\n000\r\n\r\n")),
    served("extension", chunks(b'f;a=b;c="d"\r\n' + BODY + b"\r\n0\r\n\r\n")),
    served("extension behind blanks", chunks(b"f \t;a\r\n" + BODY + b"\r\n0\r\n\r\n")),
    served("chunks of one byte", chunks(b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n")),
    served("length in a trailer", chunks(b"f\r\n" + BODY + b"\r\n0\r\nContent-Length: 400\r\n\r\n")),
    served("coding in a trailer", chunks(b"f\r\n" + BODY + b"\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n")),
    served("chunks in a sized body", post(b"Content-Length: %d\r\n" % len(JSON_CHUNKS), body=JSON_CHUNKS), JSON_CHUNKS),
    served("length with an underscore in its name", post(b"Content_Length: 4\r\n", SIZED)),
    served("coding with an underscore in its name", post(b"Transfer_Encoding: chunked\r\n", SIZED)),
    served("host with an underscore in its name", post(b"X_Host: evil\r\n", SIZED)),
    served("length named as an option of the connection", post(SIZED, b"Connection: content-length\r\n")),
    served(
        "coding named as an option of the connection", post(CHUNKED, b"Connection: transfer-encoding\r\n", body=CHUNKS)
    ),
    served("host named as an option of the connection", post(SIZED, b"Connection: host, x-request-id\r\n")),
    served("keep-alive with numbers", post(SIZED, b"Keep-Alive: timeout=999999, max=-1\r\n")),
    served("te", post(SIZED, b"TE: trailers, deflate;q=0.5\r\n", b"Connection: TE\r\n")),
    served("max-forwards", post(SIZED, b"Max-Forwards: 0\r\n")),
    served("content encoding of what is none", post(SIZED, b"Content-Encoding: identity\r\n")),
    served("rewritten target", post(SIZED, b"X-Original-URL: /admin\r\n", b"X-Rewrite-URL: /admin\r\n")),
    served("another method in a field", post(SIZED, b"X-HTTP-Method-Override: DELETE\r\n")),
    served("forwarded for", post(SIZED, b"X-Forwarded-For: 127.0.0.1\r\n", b"Forwarded: for=127.0.0.1\r\n")),
    served("target in absolute form of another host", at(b"http://evil.example/v1/chat/completions")),
    served("target in absolute form with user and port", at(b"http://u:p@evil.example:1/v1/chat/completions")),
    served("two in one write", post(SIZED) + post(SIZED), BODY, BODY),
    served("sized behind chunked", chunks(CHUNKS) + post(SIZED), BODY, BODY),
    served("empty lines before", b"\r\n\r\n" + post(SIZED)),
    served("old with keep-alive", post(SIZED, b"Connection: keep-alive\r\n").replace(b"HTTP/1.1", b"HTTP/1.0")),
    served("query with a request in it", at(b"/v1/chat/completions?a=%0d%0a%0d%0aGET%20/b%20HTTP/1.1")),
    Case("asked to close", post(SIZED, b"Connection: close\r\n"), (200,), True, (BODY,)),
    Case("asked to close and not to", post(SIZED, b"Connection: keep-alive, close\r\n"), (200,), True, (BODY,)),
    Case("old", post(SIZED).replace(b"HTTP/1.1", b"HTTP/1.0"), (200,), True, (BODY,)),
    served("no length and no body", post(body=b""), b""),
    served("length of zero", post(b"Content-Length: 0\r\n", body=b""), b""),
    served("chunks of nothing", chunks(b"0\r\n\r\n"), b""),
    own("another path", at(b"/nowhere")),
    own("path with dots", at(b"/v1/../v1/chat/completions")),
    own("path with escaped dots", at(b"/%2e%2e/v1/chat/completions")),
    own("path with an escaped slash", at(b"/v1%2fchat%2fcompletions")),
    own("path with escaped letters", at(b"/%76%31/chat/completions")),
    own("path twice escaped", at(b"/v1/%252e%252e/chat/completions")),
    own("path with two slashes", at(b"//v1/chat/completions")),
    own("path with two slashes inside", at(b"/v1//chat/completions")),
    own("path with a dot", at(b"/v1/./chat/completions")),
    own("path with a slash behind", at(b"/v1/chat/completions/")),
    own("path with a parameter", at(b"/v1/chat/completions;a=b")),
    own("path with a fragment", at(b"/v1/chat/completions#a"), 400, 404),
    own("path with a backslash", at(b"/v1\\chat\\completions")),
    own("path with an escaped NUL", at(b"/v1/chat/completions%00")),
    own("path with escaped CRLF", at(b"/v1/chat/completions%0d%0aX:%20y")),
    own("path with overlong dots", at(b"/%c0%ae%c0%ae/v1/chat/completions")),
    own("path in other case", at(b"/V1/Chat/Completions")),
    own("path of the control plane", at(b"/config")),
    own("path of an engine's own", at(b"/v1/load_lora_adapter")),
    own("path of an engine's control", at(b"/sleep?level=2")),
    own("path with a wildcard", b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n"),
    own("options", b"OPTIONS /v1/chat/completions HTTP/1.1\r\n" + HOST + b"\r\n", 405),
    own("trace", b"TRACE /v1/chat/completions HTTP/1.1\r\n" + HOST + b"\r\n", 405),
    own("delete", b"DELETE /v1/chat/completions HTTP/1.1\r\n" + HOST + b"\r\n", 405),
    own("purge", b"PURGE /v1/chat/completions HTTP/1.1\r\n" + HOST + b"\r\n", 405),
    own("authority alone in absolute form", at(b"http://g")),
    own("dots in absolute form", at(b"http://g/v1/../v1/chat/completions")),
    own("body that is a request", post(b"Content-Length: %d\r\n" % len(INNER), body=INNER), 400),
    own("body that is no JSON", post(b"Content-Length: 2\r\n", body=b"{]"), 400),
]

CASES = REFUSED + SERVED
