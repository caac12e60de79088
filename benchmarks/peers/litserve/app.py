"""sentence-transformers behind LitServe, which batches what arrives together.

    python app.py MODEL --port N

Up to 32 texts make a batch, as `encode` has it by default, and wait 5 ms for each other. With no wait at all,
LitServe's worker polls its queue without pause and takes a core from the model. Its fast queue is what it
advises for more than a hundred requests per second.
"""

import argparse

import litserve
from sentence_transformers import SentenceTransformer

BATCH = 32


class Embed(litserve.LitAPI):
    def __init__(self, path: str) -> None:
        super().__init__(max_batch_size=BATCH, batch_timeout=0.005, api_path="/embed")
        self.path = path

    def setup(self, device):
        self.model = SentenceTransformer(self.path, device=device)

    def decode_request(self, request):
        return request["inputs"]

    def predict(self, texts):
        return self.model.encode(
            texts, batch_size=BATCH, normalize_embeddings=True, show_progress_bar=False
        )

    def encode_response(self, vector):
        return {"embeddings": [vector.tolist()]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    server = litserve.LitServer(Embed(given.model), accelerator="cpu", fast_queue=True)
    server.run("127.0.0.1", given.port, log_level="warning", generate_client_file=False)
