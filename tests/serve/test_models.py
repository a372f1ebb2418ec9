"""The model of a server is found by its name."""

from tests.serve.running import MODEL, Running

ASK = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}


def test_a_name_that_is_not_there(server: Running) -> None:
    cards = server.client.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == [MODEL] == [server.client.get(f"/v1/models/{MODEL}").json()["id"]]
    assert server.post("completions", ASK).status_code == 200, "a request need not name it"
    for unknown in (
        server.post("completions", {"model": "tinny", **ASK}),
        server.client.post("/tokenize", json={"model": "tinny", "prompt": "Hello"}),
        server.client.get("/v1/models/tinny"),
        server.client.get("/tokenizer_info?model=tinny"),
    ):
        assert unknown.status_code == 404
        assert f"did you mean {MODEL!r}?" in unknown.json()["error"]["message"]
