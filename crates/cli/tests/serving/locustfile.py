"""Load by the `locust` package. In: LOCUST_HOST, LOCUST_KEY; out: its exit code, 1 when an answer was wrong, or when of either
kind none was whole.
NOT here: starting the server (serving.rs)."""

import json
import os

from locust import FastHttpUser, constant, events, task

HEADERS = {"Authorization": "Bearer " + os.environ["LOCUST_KEY"]}


# Whole answers of each kind: a server that turns everyone away answers nothing wrong.
answered = {"whole": 0, "stream": 0}


@events.quitting.add_listener
def enough(environment, **_):
    if not all(answered.values()):
        print("error: too few whole answers:", answered)
        environment.process_exit_code = 1


class Client(FastHttpUser):
    wait_time = constant(0)

    def on_start(self):
        self.model = self.client.get("/v1/models", headers=HEADERS).json()["data"][0]["id"]

    def ask(self, **fields):
        body = {"model": self.model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 16, "temperature": 0, **fields}
        return self.client.post("/v1/chat/completions", json=body, headers=HEADERS, catch_response=True)

    @task(3)
    def whole(self):
        with self.ask() as response:
            if response.status_code == 429 and int(response.headers["retry-after"]) >= 1:
                response.success()
            elif response.status_code != 200 or not response.json()["choices"][0]["message"]["content"]:
                response.failure(f"{response.status_code} {response.text}")
            else:
                answered["whole"] += 1

    @task(3)
    def stream(self):
        with self.ask(stream=True, stream_options={"include_usage": True}) as response:
            data = [line[6:] for line in (response.text or "").splitlines() if line.startswith("data: ")]
            if response.status_code == 429:
                response.success()
            elif response.status_code != 200 or data[-1] != "[DONE]" or not json.loads(data[-2])["usage"]["completion_tokens"]:
                response.failure(f"{response.status_code} {response.text}")
            else:
                answered["stream"] += 1

    @task(1)
    def bad(self):
        with self.ask(max_tokens=-1) as response:
            if response.status_code == 400 and response.json()["error"]["param"] == "max_tokens":
                response.success()
            else:
                response.failure(f"{response.status_code} {response.text}")
