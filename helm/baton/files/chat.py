"""The helm test: sends one chat through the gateways' Service, as a client does, and prints the answer."""

import http.client
import json
import os
import socket
import ssl

address = os.environ["HOST"], int(os.environ["PORT"])
body = {
    "model": os.environ["MODEL"],
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 16,
}
headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('BATON_API_KEY', 'none')}"}
connection = http.client.HTTPConnection(*address)
connection.sock = socket.create_connection(address, timeout=120)
if name := os.environ.get("TLS_NAME"):  # the certificate's, which need not be that of the Service
    own = os.environ["CA_FILE"]  # not there: the certificate is from a public CA
    trusted = ssl.create_default_context(cafile=own if os.path.exists(own) else None)
    connection.sock = trusted.wrap_socket(connection.sock, server_hostname=name)
connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
response = connection.getresponse()
answer = json.load(response)
print(json.dumps(answer, indent=1))
if response.status != 200 or not answer["usage"]["completion_tokens"]:
    raise SystemExit("the gateways did not answer the chat")
