"""x."""
import httpx
def test_x(http: httpx.Client) -> None:
    for path in ("/healthz","/readyz","/v1/models","/metrics", "/openapi.json", "/nope"):
        print(path, http.get(path).text[:600])
    r = http.post("/v1/completions", json={"prompt":"hello","max_tokens":8,"temperature":0,"logprobs":2}); print(r.status_code, r.text)
    r = http.post("/v1/chat/completions", json={"messages":[{"role":"user","content":"hello"}],"max_tokens":8,"stream":True,"stream_options":{"include_usage":True}}); print(r.status_code, r.text)
    r = http.post("/v1/chat/completions", json={"messages":[{"role":"user","content":"hello"}],"tools":[1]}); print(r.status_code, r.text)
