#!/bin/sh
# The dispatcher and a worker of Celery. Ctrl-C stops both.
set -e
cd "$(dirname "$0")"
if [ -n "$DATABASE_URL" ]; then fairlane migrate shop:app; fi
fairlane forward shop:forwarder &
dispatcher=$!
celery -A shop:celery worker -c 2 &
worker=$!
trap 'kill "$dispatcher" "$worker" 2>/dev/null || true; wait' INT TERM EXIT
wait "$worker"
