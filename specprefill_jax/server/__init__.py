"""The OpenAI-compatible HTTP server around an engine; needs the extra `serve`.

`app` lists the routes. A request goes through `middleware`, `body`, `protocol` and `prepare` to the engine, and its
answer comes back through `generation` and `chat` or `completions`, in one piece or by `sse`.
`ray_app` has the same app on Ray Serve, many times; needs the extra `ray`.
"""
