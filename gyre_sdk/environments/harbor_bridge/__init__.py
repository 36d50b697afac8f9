"""Harbor both ways (extra `harbor`, Python 3.12 or newer): its trials in our sandboxes, and its agents against our gateway.

harbor run ... --env gyre_sdk.environments.harbor_bridge.environment:GyreEnvironment
python3.12 -m gyre_sdk.environments.harbor_bridge.trial --task FOLDER --agent NAME --base-url URL --token TOKEN --model MODEL
"""
