#!/bin/sh
# The dispatcher and a worker of Dramatiq. Ctrl-C stops both.
set -e
cd "$(dirname "$0")"
if [ -n "$DATABASE_URL" ]; then fairlane migrate shop:app; fi
fairlane forward shop:forwarder &
dispatcher=$!
dramatiq shop --processes 1 &
worker=$!
trap 'kill "$dispatcher" "$worker" 2>/dev/null || true; wait' INT TERM EXIT
wait "$worker"
