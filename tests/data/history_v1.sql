PRAGMA application_id = 1162102597;
PRAGMA user_version = 1;
BEGIN TRANSACTION;
CREATE TABLE chat (
            id TEXT PRIMARY KEY,
            title TEXT NOT NULL DEFAULT '',
            created REAL NOT NULL,
            updated REAL NOT NULL,
            system TEXT NOT NULL DEFAULT '',
            model TEXT NOT NULL DEFAULT '',
            params TEXT NOT NULL DEFAULT '{}',
            pinned INTEGER NOT NULL DEFAULT 0,
            head_id TEXT,
            clock INTEGER NOT NULL DEFAULT 0,
            deleted REAL
        );
INSERT INTO "chat" VALUES('25aa0a71c5c7465b97c091a59fdabfd4','What is the capital of France?',1.79598856526718568798e+09,1.79598856529921269411e+09,'Be brief.','smollm2-135m','{"temperature":0.5}',0,'ee3fbd81d87d475ca2c1d485c1b6fd30',5,NULL);
CREATE TABLE message (
            number INTEGER PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            chat_id TEXT NOT NULL REFERENCES chat(id) ON DELETE CASCADE,
            parent_id TEXT REFERENCES message(id) ON DELETE CASCADE,
            role TEXT NOT NULL,
            text TEXT NOT NULL DEFAULT '',
            reasoning TEXT NOT NULL DEFAULT '',
            extra TEXT NOT NULL DEFAULT '{}',
            created REAL NOT NULL,
            partial INTEGER NOT NULL DEFAULT 0,
            finish_reason TEXT,
            model TEXT NOT NULL DEFAULT '',
            sampling TEXT NOT NULL DEFAULT '{}',
            prompt_tokens INTEGER,
            cached_tokens INTEGER,
            completion_tokens INTEGER,
            timings TEXT,
            draft TEXT,
            notices TEXT NOT NULL DEFAULT '[]',
            error TEXT,
            seen INTEGER NOT NULL DEFAULT 0,
            indexed INTEGER NOT NULL DEFAULT 0
        );
INSERT INTO "message" VALUES(1,'a749e02fee7c43af965ca03e371d1c44','25aa0a71c5c7465b97c091a59fdabfd4',NULL,'user','What is the capital of France?','','{}',1.79598856527107548714e+09,0,NULL,'','{}',NULL,NULL,NULL,NULL,NULL,'[]',NULL,1,0);
INSERT INTO "message" VALUES(2,'d22747dedbae487d92c7b009fa0500f7','25aa0a71c5c7465b97c091a59fdabfd4','a749e02fee7c43af965ca03e371d1c44','assistant','Paris.','','{}',1.79598856527949619294e+09,0,'stop','smollm2-135m','{"temperature":0.5,"top_k":0,"top_p":1.0,"min_p":0.0,"typical_p":1.0,"repetition_penalty":1.0,"presence_penalty":0.0,"frequency_penalty":0.0,"logit_bias":{},"seed":7,"max_new_tokens":null,"stop":["END"],"stop_token_ids":[],"ignore_eos":false}',30,10,3,'{"queued_s":0.1,"prefill_s":0.2,"decode_s":0.3,"prefill_tokens":20,"completion_tokens":3}','{"proposed":4,"accepted":2,"steps":2}','[["trimmed","2 messages left out"]]',NULL,2,0);
INSERT INTO "message" VALUES(3,'d0b976ebc02749c0b290537d5aa90843','25aa0a71c5c7465b97c091a59fdabfd4','a749e02fee7c43af965ca03e371d1c44','assistant','It is Par','','{}',1.79598856528734350211e+09,0,'cancelled','smollm2-135m','{"temperature":0.5,"top_k":0,"top_p":1.0,"min_p":0.0,"typical_p":1.0,"repetition_penalty":1.0,"presence_penalty":0.0,"frequency_penalty":0.0,"logit_bias":{},"seed":7,"max_new_tokens":null,"stop":["END"],"stop_token_ids":[],"ignore_eos":false}',30,10,3,'{"queued_s":0.1,"prefill_s":0.2,"decode_s":0.3,"prefill_tokens":20,"completion_tokens":3}','{"proposed":4,"accepted":2,"steps":2}','[["trimmed","2 messages left out"]]',NULL,3,0);
INSERT INTO "message" VALUES(4,'f9649b1a1c6042189fa1228748cf168f','25aa0a71c5c7465b97c091a59fdabfd4','d0b976ebc02749c0b290537d5aa90843','user','And of Norway?','','{"parts":[["text","And of Norway?"]]}',1.79598856529101228709e+09,0,NULL,'','{}',NULL,NULL,NULL,NULL,NULL,'[]',NULL,4,0);
INSERT INTO "message" VALUES(5,'ee3fbd81d87d475ca2c1d485c1b6fd30','25aa0a71c5c7465b97c091a59fdabfd4','f9649b1a1c6042189fa1228748cf168f','assistant','Os','','{}',1.79598856529921269411e+09,1,NULL,'smollm2-135m','{"temperature":1.0,"top_k":0,"top_p":1.0,"min_p":0.0,"typical_p":1.0,"repetition_penalty":1.0,"presence_penalty":0.0,"frequency_penalty":0.0,"logit_bias":{},"seed":null,"max_new_tokens":null,"stop":[],"stop_token_ids":[],"ignore_eos":false}',NULL,NULL,NULL,NULL,NULL,'[]',NULL,5,0);
CREATE INDEX message_by_parent ON message(chat_id, parent_id, number);
CREATE INDEX message_children ON message(parent_id);
CREATE INDEX message_unindexed ON message(number) WHERE indexed = 0;
CREATE INDEX chat_by_use ON chat(pinned, updated);
COMMIT;
