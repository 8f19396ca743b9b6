"""HTTP/1.1: connections, the parsing of requests, the encoding of responses, and all resources."""
