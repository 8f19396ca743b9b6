"""The protocols of other servers, over HTTP and on the same data plane."""
